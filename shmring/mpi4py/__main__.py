"""`python -m shmring.mpi4py` runs a program that imports mpi4py."""

from .run import main

if __name__ == "__main__":
    main()
