# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
CacheDType = Literal["auto", "fp8"]
CacheDType = _ascend_patches_hooks.with_dtypes(CacheDType, ("int8", "mxfp8"))  # ucm: npu.cache.dtypes
