"""distmon: watches distributed PyTorch training from the inside."""
