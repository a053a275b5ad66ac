# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
IndexerKVDType = Literal["auto", "fp8"]
IndexerKVDType = _ascend_patches_hooks.with_dtypes(IndexerKVDType, ("int8",))  # ucm: npu.indexer.dtypes
