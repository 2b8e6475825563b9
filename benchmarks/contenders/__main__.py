"""List all contenders."""

from benchmarks.contenders import CONTENDERS

if __name__ == "__main__":
    for contender in CONTENDERS:
        print(f"{contender.name:18} {contender.description}")
        if reason := contender.unavailable():
            print(f"{'':18} skipped here: {reason}")
