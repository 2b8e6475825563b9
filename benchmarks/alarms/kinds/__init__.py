"""Small models of many kinds, trained for the second corpus. Each file has some kinds."""
