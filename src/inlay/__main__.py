"""The start of the ``inlay`` command, and of ``python -m inlay``."""


def entry() -> None:
    """Run the command line. Ctrl-C ends it with one line, also while its modules are imported."""
    try:
        from inlay.cli.main import entry as run
    except KeyboardInterrupt:
        import sys

        print("inlay: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    entry()
