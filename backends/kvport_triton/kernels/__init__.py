"""The Triton kernels. Importing this package imports triton, which decides how the process runs them."""
