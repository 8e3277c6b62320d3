"""Workers of the Java KCL and of this package in one application: `make test-interop`.

`python -m tests.interop` runs the cases of `cases.py` in the applications of `applications.py`. The
embedded AWS, each Java worker and each of our workers are processes of their own. Java's jars come
from Maven, into a folder outside of the tree. Where they cannot be fetched, the run says why and
ends with exit code 0.

`test_harness.py` tests the parts that need no Java.
"""
