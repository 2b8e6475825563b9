"""The sealed set: kinds of training that are in none of the other sets, the audit set included.

It was written and recorded by somebody who had read neither the rules nor what they say about any
run, and is scored once the rules are final. Whether a run is healthy was judged by its loss and by
what is usual in training. No threshold may be chosen on it.
"""
