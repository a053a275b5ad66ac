"""Memory that processes of a host share: a tier of blocks, and the blocks that an engine stages."""
