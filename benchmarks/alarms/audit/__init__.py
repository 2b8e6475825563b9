"""The audit set: kinds of training that are in none of the other sets.

It was written and recorded by somebody who had read neither the rules nor what they say about any
run. Whether a run is healthy was judged by its loss and by what is usual in training. No threshold
may be chosen on it.
"""
