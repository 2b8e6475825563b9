"""The unseen set: kinds of training that are in none of the other sets, and look-alikes of faults.

It was written and recorded before the rules of this round were changed, and scored once before and
once after. Some of its healthy runs resemble a fault on purpose: a loss that is flat for long, a
loss that falls far below zero, data that has to repeat, layers that are frozen by a schedule. No
threshold may be chosen on it.
"""
