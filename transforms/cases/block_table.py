# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.9.0
class BlockTable:
    def add_row(self, block_ids, row_idx):
        self.rows[row_idx] = block_ids

    def clear_row(self, row_idx: int) -> None:  # ucm: block_table.clear-row
        _ucm_hooks.clear_row(self, row_idx)

# release 0.9.0
class MultiGroupBlockTable:
    def add_row(self, block_ids, row_idx):
        self.rows[row_idx] = block_ids

    def clear_row(self, row_idx: int) -> None:  # ucm: block_table.clear-row-groups
        _ucm_hooks.clear_row(self, row_idx)
