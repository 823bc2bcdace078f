"""The theorems of arXiv 2504.15956 and 2504.19901, one file each."""
