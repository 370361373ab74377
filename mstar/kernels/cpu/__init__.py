"""The compiled CPU kernels: C++ sources, how they become a library, and the calls into it."""
