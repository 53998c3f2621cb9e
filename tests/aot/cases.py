"""All that is compiled for H200."""

from tests.aot.cache_cases import CACHE_CASES
from tests.aot.kernel_cases import CASES as KERNEL_CASES
from tests.aot.step import STEP_CASES

CASES = (*KERNEL_CASES, *STEP_CASES, *CACHE_CASES)
