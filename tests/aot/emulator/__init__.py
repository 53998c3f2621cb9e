"""Runs compiled kernels for NVIDIA GPUs on a CPU: their PTX, a CTA after the other.

    program.py       what a kernel's PTX says
    memory.py        global and shared memory, and who may touch which byte of it when
    order.py         what the warpgroups of a CTA know of each other
    copies.py        the copy engine's tensors (TMA), barriers in shared memory, and asynchronous copies
    tensor_cores.py  the numbers of a wgmma, mma, ldmatrix and stmatrix
    arithmetic.py    what a thread computes by itself
    cta.py           a CTA: its warpgroups, in one of two models of asynchrony
    launch.py        compiles a kernel for a GPU, and runs its grid

An access that may go wrong on a GPU is a fault, though it went well here: two warps that touch the same byte
without a `bar.sync` between them, two warpgroups without a barrier that tells one of the other, an
asynchronous unit that reads what threads stored, or writes over what they loaded, without a fence, memory
that is used again before it is free, addresses out of bounds, a wait for what never comes. What does not wait
for a copy or a product gets other numbers in one of two models: they land at once, or only when waited for.

Not modelled: SASS, branches that the threads of a CTA take differently (a fault), clusters, and time.
"""
