# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class MambaManager:
    def get_num_blocks_to_allocate(self, *given):
        if self.mode != "align":
            num_tokens += self.block_size * _ascend_patches_hooks.external_blocks(len(new_computed_blocks) * self.block_size, total_computed_tokens, num_tokens_main_model)  # ucm: npu.mamba.external-of-all
            return super().get_num_blocks_to_allocate(...)
        num_new_blocks += _ascend_patches_hooks.external_blocks(len(new_computed_blocks) * self.block_size, total_computed_tokens, num_tokens_main_model)  # ucm: npu.mamba.external-of-aligned
        return num_new_blocks + num_evictable_computed_blocks
