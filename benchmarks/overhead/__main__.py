"""Read the command line and run: `python -m benchmarks.overhead`."""

from benchmarks.overhead.command import main

if __name__ == "__main__":
    main()
