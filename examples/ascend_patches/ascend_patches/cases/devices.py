# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.24.0
def get_physical_gpu_ids_for_local_dp_rank(
    device_control_env_var, local_dp_rank, world_size, local_world_size=None, user_assigned_gpu_ids=None
):
    local_dp_rank = _ascend_patches_hooks.rank_among_visible(device_control_env_var, local_dp_rank, world_size, local_world_size, user_assigned_gpu_ids)  # ucm: npu.devices.only-its-own
    return look(local_dp_rank)
