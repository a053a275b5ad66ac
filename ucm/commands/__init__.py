"""The subcommands of ``ucm``, except ``ucm doctor``, which is in `ucm.doctor`."""
