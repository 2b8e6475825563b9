"""What monitoring costs a training step: distmon and others, side by side in one run.

    python -m benchmarks.overhead                      # GPT-2, growth and 2 ranks, under 10 minutes
    python -m benchmarks.overhead --full               # everything
    python -m benchmarks.overhead --workloads gpt2 --contenders 'distmon sampled,naive clone'
    python -m benchmarks.overhead --model mymodule:factory    # your model, with all contenders

Contenders take turns after real training steps, so that each finds caches as cold as in training
and drift of the machine affects all alike. Ratios count; times are those of this machine. Writes
`results.csv`, `summary.md` and plots into the folder given with --out.
"""
