"""`distmon serve`: the views of runs, live in a browser."""
