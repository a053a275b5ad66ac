# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class BlockTables:
    def append_block_ids(self, req_index, new_block_ids, overwrite):
        new_block_ids, overwrite = _ucm_hooks.v2_append_block_ids(self, req_index, new_block_ids, overwrite)  # ucm: block_table_v2.append
        self.rows.write(req_index, new_block_ids, overwrite)
