"""What a training loop does, seen without its help: losses, gradient norms, steps."""
