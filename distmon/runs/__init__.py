"""A run on disk: `run_folder` and `params_file` write it, `reader` reads it back."""
