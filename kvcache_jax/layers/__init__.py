"""Layer kinds, a file each: the arrays that one model layer keeps per token, and how attention reads them."""
