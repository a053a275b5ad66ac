# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
class ECExampleConnector:
    def start_load_caches(self, encoder_cache, **kwargs):
        device = current_platform.device_type
        device = _ascend_patches_hooks.own_device(self, device)  # ucm: npu.encoder.own-device
        load(device)
