"""The `distmon` command: one module per subcommand."""
