"""`python -m hvd_train` is `hvd-train`."""

from hvd_train.cli import main

if __name__ == "__main__":
    main()
