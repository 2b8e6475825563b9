"""The blind set: kinds of training that are in neither half of the second corpus.

It was written and committed before its score was seen, and before the rules were changed. No
threshold may be chosen on it: tune on the two halves (`split.json`), then score it.
"""
