"""A back end of Triton's by the name of ``cpu`` that compiles nothing: all kernels are interpreted.

vLLM's V2 model runner wants Triton, and for the CPU a back end of that name. `tests.e2e.environment` installs this
package as one; with ``TRITON_INTERPRET=1`` Triton never asks it for anything but whether it is there.
"""
