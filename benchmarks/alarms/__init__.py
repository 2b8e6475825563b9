"""Whether the rules find planted faults, and stay quiet on healthy runs.

    python -m benchmarks.alarms                    # replay tests/runs with the present rules
    python -m benchmarks.alarms --verbose          # and list every alert
    python -m benchmarks.alarms --make             # train all runs again
    python -m benchmarks.alarms --make nan-sgd     # or some
    python -m benchmarks.alarms --make --seed 1 --corpus /tmp/unseen

The last trains the same scenarios with other weights and data, elsewhere: rules that were tuned on
the corpus have to do as well on runs that were not looked at.

Required of the rules: each planted fault is named, at its place and in time; a run that reaches NaN
by itself has a warning of the gain, gradient, update-ratio or loss rules at least 5 steps before;
a healthy run has alerts in less than 5% of its observations and no critical one. Exit code 1 when
something is missed.

Then the second corpus: short runs of many kinds, healthy and with planted faults, in the sets of
`split.json`. Rules are tuned on some of the sets; what they are worth is shown by the others, whose
alerts are not listed, so that rules are not tuned on them.

    python -m benchmarks.alarms --table            # only that table, as kept in docs/rules.md

    python -m benchmarks.alarms.statistics         # where the thresholds come from
    python -m benchmarks.alarms.record_cases       # train the second corpus again
    python -m benchmarks.alarms.clean_runs         # repeat a healthy run, count false alarms
"""
