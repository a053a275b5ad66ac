"""A request's content besides its tokens, and which of its blocks depend on each part.

With stand-ins for vLLM's objects; `test_with_vllm.py` has the real ones, and torch's tensors.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ucm.hashing.stand_ins import (
    LoRARequest,
    ModelConfig,
    MultiModalFeatureSpec,
    OldRequest,
    PlaceholderRange,
    Request,
    VllmConfig,
    write_adapter,
)
from ucm.hashing.request_content import ContentReader, NotCacheableError
from ucm.hashing.request_hasher import RequestHasher
from ucm.salts import tag_digits, tag_name, tag_of_salt

pytestmark = pytest.mark.usefixtures("later")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENS = list(range(64))
SIZE = 8
CAT, DOG = "c" * 64, "d" * 64
CONFIG = VllmConfig(ModelConfig("m"))


def keys(request: Any, config: VllmConfig = CONFIG, *, trusting: bool = False) -> list[bytes]:
    content = ContentReader(config, trust_media_names=trusting).read(request)
    return RequestHasher(b"engine").generate_block_hashes(request.all_token_ids, SIZE, content)


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Return the number of blocks that two requests share; all blocks after the first difference must differ."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def image(identifier: str, offset: int, length: int = 4, **more: Any) -> MultiModalFeatureSpec:
    """Return an input with its own data, unless other data are given."""
    data = more.pop("data", pixels(identifier))
    return MultiModalFeatureSpec(
        identifier, PlaceholderRange(offset, length, more.pop("is_embed", None)), data=data, **more
    )


def pixels(name: str) -> dict[str, Any]:
    """Return a processor's result for an input."""
    values = np.frombuffer(name.encode().ljust(128), np.uint8).astype(np.float32)
    return {"pixel_values": values.reshape(4, -1), "grid": [1, (2, 2)]}


def test_a_plain_request_is_its_tokens() -> None:
    assert ContentReader(CONFIG).read(Request("r", TOKENS)).root == b""
    assert keys(Request("r", TOKENS)) == RequestHasher(b"engine").generate_block_hashes(TOKENS, SIZE)


def test_keys_say_which_salt_they_have_and_lie_in_all_directories() -> None:
    long = list(range(2000 * SIZE))
    for salt in (None, "", "a", "\ud800"):
        of_one = keys(Request("r", long, cache_salt=salt))
        assert {tag_name(tag_digits(key)) for key in of_one} == {tag_name(tag_of_salt(salt).hex())}
        assert len({key[0] for key in of_one}) > 250
        assert len({key[5] for key in of_one}) > 250


def test_two_salts_share_nothing() -> None:
    salted = [keys(Request("r", TOKENS, cache_salt=salt)) for salt in (None, "a", "b")]
    assert [shared(a, b) for a, b in pairwise(salted)] == [0, 0]
    assert keys(Request("r", TOKENS, cache_salt="")) == salted[0]


def test_two_loras_of_one_name_share_nothing(tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / name / "sql", name.encode()) for name in ("one", "other")]
    loras = [LoRARequest("sql", number, str(path)) for number, path in enumerate(paths, 1)]
    with_lora = [keys(Request("r", TOKENS, lora_request=lora)) for lora in (None, *loras)]
    assert [shared(with_lora[a], with_lora[b]) for a, b in ((0, 1), (0, 2), (1, 2))] == [0, 0, 0]


def test_a_lora_and_a_salt_of_the_same_text_are_two_things(tmp_path: Path) -> None:
    lora = LoRARequest("sql", 1, str(write_adapter(tmp_path, b"A")))
    named = [Request("r", TOKENS, cache_salt="sql"), Request("r", TOKENS, lora_request=lora)]
    both = Request("r", TOKENS, lora_request=lora, cache_salt="sql")
    assert len({keys(request)[0] for request in (*named, both)}) == 3


@pytest.mark.parametrize(("offset", "before"), [(0, 0), (7, 0), (8, 1), (30, 3), (63, 7)])
def test_two_images_share_what_lies_before_them(offset: int, before: int) -> None:
    cat, dog = (keys(Request("r", TOKENS, mm_features=[image(name, offset)])) for name in (CAT, DOG))
    assert shared(cat, dog) == before
    assert shared(cat, keys(Request("r", TOKENS))) == before


def test_the_same_image_elsewhere_or_of_another_length_is_another() -> None:
    images = [image(CAT, 9), image(CAT, 10), image(CAT, 9, 5), image(CAT, 9, modality="audio")]
    images.append(image(CAT, 9, is_embed=np.array([True, False, True, True])))
    found = [keys(Request("r", TOKENS, mm_features=[one])) for one in images]
    assert len({key for of_request in found for key in of_request[1:]}) == 5 * 7
    assert len({of_request[0] for of_request in found}) == 1


def test_images_count_one_by_one_and_in_any_order() -> None:
    both = keys(Request("r", TOKENS, mm_features=[image(CAT, 9), image(DOG, 40)]))
    assert both == keys(Request("r", TOKENS, mm_features=[image(DOG, 40), image(CAT, 9)]))
    assert shared(both, keys(Request("r", TOKENS, mm_features=[image(CAT, 9)]))) == 5
    assert shared(both, keys(Request("r", TOKENS, mm_features=[image(DOG, 9), image(CAT, 40)]))) == 1


def test_an_input_without_placeholders_counts_too() -> None:
    """For instance audio in an encoder-decoder model."""
    assert shared(*(keys(Request("r", TOKENS, mm_features=[image(name, 0, 0)])) for name in (CAT, DOG))) == 0


def test_requests_of_0_9_1_are_read_alike() -> None:
    both = [OldRequest("r", TOKENS, [name], [PlaceholderRange(30, 4)]) for name in (CAT, DOG)]
    assert shared(*(keys(one, trusting=True) for one in both)) == 3
    for one, name in zip(both, (CAT, DOG), strict=True):
        one.mm_inputs = [pixels(name)]
    assert shared(*map(keys, both)) == 3
    assert keys(OldRequest("r", TOKENS)) == keys(Request("r", TOKENS))


def test_the_name_that_a_vision_tower_with_lora_adds_does_not_count() -> None:
    plain = keys(Request("r", TOKENS, mm_features=[image(CAT, 9)]), trusting=True)
    assert keys(Request("r", TOKENS, mm_features=[image(f"sql:{CAT}", 9)]), trusting=True) == plain
    assert keys(Request("r", TOKENS, mm_features=[image(f"sql:{CAT}", 9, mm_hash=CAT)]), trusting=True) == plain


@pytest.mark.parametrize("identifier", ["0-image-0", "renderer0-mm-3-image-0", "my-cat", "c" * 63, "", "C" * 64])
def test_an_input_that_is_only_named_is_not_cacheable(identifier: str) -> None:
    with pytest.raises(NotCacheableError, match="a name in place of a hash of its content"):
        keys(Request("r", TOKENS, mm_features=[image(identifier, 9)]), trusting=True)


def test_a_clients_name_does_not_count_for_an_inputs_content() -> None:
    """Even if it looks like a hash: two images of one name differ, and one image under two names is the same."""
    one, other = (Request("r", TOKENS, mm_features=[image(CAT, 9, data=pixels(of))]) for of in (CAT, DOG))
    assert shared(keys(one), keys(other)) == 1
    assert shared(keys(one, trusting=True), keys(other, trusting=True)) == 8
    named = Request("r", TOKENS, mm_features=[image("my-cat", 9, data=pixels(CAT))])
    assert keys(named) == keys(one)
    assert not set(keys(one)[1:]) & set(keys(one, trusting=True)[1:])


def test_two_inputs_of_one_name_in_one_engine_are_not_both_stored() -> None:
    """vLLM caches encodings by name, so the second one gets the encoding of the first."""
    reader = ContentReader(CONFIG)
    one, other = (Request("r", TOKENS, mm_features=[image(CAT, 9, data=pixels(of))]) for of in (CAT, DOG))
    assert reader.read(one) == reader.read(one)
    for request in (other, one):
        with pytest.raises(NotCacheableError, match="other content under a name of the request"):
            reader.read(request)


def test_a_name_that_stood_for_unknown_data_once_stays_ambiguous() -> None:
    reader = ContentReader(CONFIG)
    for data in (pixels(CAT), None, pixels(CAT)):
        request = Request("r", TOKENS, mm_features=[image(CAT, 9, data=data)])
        if data is not None and not reader.changes:
            assert reader.read(request).media
        else:
            with pytest.raises(NotCacheableError):
                reader.read(request)


@pytest.mark.parametrize("other", [{"modality": "audio"}, {"data": pixels(DOG)}])
def test_all_inputs_of_a_refused_request_count_for_their_names(other: dict[str, Any]) -> None:
    """Its first input is refused; vLLM encodes its second one under the name of a later request's all the same."""
    reader = ContentReader(CONFIG)
    refused = Request("r", TOKENS, mm_features=[image("x", 9, data={"a": {1}}), image(CAT, 20, **other)])
    for request in (refused, Request("s", TOKENS, mm_features=[image(CAT, 9)])):
        with pytest.raises(NotCacheableError):
            reader.read(request)


def test_two_inputs_that_swap_their_names_are_both_refused() -> None:
    reader = ContentReader(CONFIG)
    first = Request("r", TOKENS, mm_features=[image("x", 9, data=pixels(CAT)), image("y", 30, data=pixels(DOG))])
    second = Request("s", TOKENS, mm_features=[image("x", 9, data=pixels(DOG)), image("y", 30, data=pixels(CAT))])
    reader.read(first)
    for request in (second, first, Request("t", TOKENS, mm_features=[image("y", 30, data=pixels(DOG))])):
        with pytest.raises(NotCacheableError, match="under a name of the request"):
            reader.read(request)


def test_an_encoding_is_named_by_its_adapter_too(tmp_path: Path) -> None:
    """A vision tower with LoRA: the name of its encoding has the adapter's name, but not its path or content."""
    reader = ContentReader(CONFIG)
    ones = [LoRARequest("sql", n, str(write_adapter(tmp_path / str(n), b"%d" % n))) for n in (1, 2)]
    features = [image(f"sql:{CAT}", 9, mm_hash=CAT, data=pixels(CAT))]
    reader.read(Request("r", TOKENS, mm_features=features, lora_request=ones[0]))
    reader.read(Request("r", TOKENS, mm_features=[image(CAT, 9)]))
    with pytest.raises(NotCacheableError, match="under a name of the request"):
        reader.read(Request("r", TOKENS, mm_features=features, lora_request=ones[1]))


def test_a_client_cannot_name_an_input_like_the_encoding_of_another_one(tmp_path: Path) -> None:
    """vLLM keeps both in one cache: an input with a client's name, and one with an adapter's name before its own."""
    reader, adapter = ContentReader(CONFIG), LoRARequest("sql", 1, str(write_adapter(tmp_path, b"1")))
    forged, other = image(f"sql:{CAT}", 9, data=pixels(DOG)), image(f"sql:{CAT}", 9, mm_hash=CAT, data=pixels(CAT))
    reader.read(Request("r", TOKENS, mm_features=[forged]))
    with pytest.raises(NotCacheableError, match="under a name of the request"):
        reader.read(Request("s", TOKENS, mm_features=[other], lora_request=adapter))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data | {"pixel_values": data["pixel_values"] + 1},
        lambda data: data | {"pixel_values": data["pixel_values"].reshape(2, -1)},
        lambda data: data | {"pixel_values": data["pixel_values"].view(np.int32)},
        lambda data: data | {"pixel_values": [data["pixel_values"]]},
        lambda data: data | {"grid": [1, (2, 3)]},
        lambda data: data | {"grid": [1, 2, 2]},
        lambda data: {"values": data["pixel_values"], "grid": data["grid"]},
        lambda data: data | {"more": None},
    ],
)
def test_all_of_an_inputs_data_counts(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    requests = [Request("r", TOKENS, mm_features=[image(CAT, 9, data=d)]) for d in (pixels(CAT), change(pixels(CAT)))]
    assert shared(*map(keys, requests)) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "comes without its data"),
        ({"a": object()}, "of type object"),
        ({"a": {1, 2}}, "of type set"),
        ({"address": 4096, "monotonic_id": 1}, "a reference in place of its data"),
        ({"address": 4096, "monotonic_id": 1, "signature": [7, 9]}, "a reference in place of its data"),
    ],
)
def test_an_input_whose_data_cannot_be_read_is_not_cacheable(data: Any, message: str) -> None:
    with pytest.raises(NotCacheableError, match=message):
        keys(Request("r", TOKENS, mm_features=[image(CAT, 9, data=data)]))


def test_an_input_without_any_identifier_is_not_cacheable() -> None:
    with pytest.raises(NotCacheableError, match="comes without its data"):
        keys(OldRequest("r", TOKENS, None, [PlaceholderRange(0, 4)]))


@pytest.mark.parametrize("holder", ["multimodal_config", "model_config"])
def test_with_all_caches_off_vllm_hashes_no_input(holder: str) -> None:
    """It then numbers the inputs, and may hash the number together with the processor's options."""
    config = VllmConfig(ModelConfig("m", multimodal_config=SimpleNamespace()))
    place: Any = config.model_config.multimodal_config if holder == "multimodal_config" else config.model_config
    request = Request("r", TOKENS, mm_features=[image(CAT, 9)])
    place.mm_processor_cache_gb = 0
    wanted = keys(request, config, trusting=True)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(NotCacheableError, match="both off"):
        keys(request, config, trusting=True)
    place.mm_processor_cache_gb = 4
    assert keys(request, config, trusting=True) == wanted


def embeddings(dtype: Any = np.float32, changed: int | None = None) -> np.ndarray[Any, Any]:
    rows = np.arange(48 * 16, dtype=dtype).reshape(48, 16)
    if changed is not None:
        rows[changed, 3] += 1
    return rows


@pytest.mark.parametrize(("changed", "before"), [(0, 0), (7, 0), (8, 1), (47, 5)])
def test_two_prompt_embeddings_share_what_lies_before_the_first_difference(changed: int, before: int) -> None:
    one, other = (Request("r", [0] * 64, prompt_embeds=rows) for rows in (embeddings(), embeddings(changed=changed)))
    assert shared(keys(one), keys(other)) == before


def test_prompt_embeddings_count_with_their_dtype_and_beside_tokens() -> None:
    rows = [embeddings(), embeddings(np.float64), embeddings().view(np.int32), embeddings()[:, :8], None]
    requests = [Request("r", [0] * 64, prompt_embeds=one) for one in rows]
    mask = [True] * 7 + [False] * 41
    requests.append(Request("r", [0] * 64, prompt_embeds=embeddings(), prompt_is_token_ids=mask))
    requests.append(Request("r", None, prompt_embeds=embeddings()))
    assert len({keys(request)[0] for request in requests}) == 7


def test_the_layout_of_embeddings_in_memory_does_not_count() -> None:
    rows = embeddings()
    strided = np.repeat(rows, 2, axis=1)[:, ::2]
    assert keys(Request("r", [0] * 64, prompt_embeds=strided)) == keys(Request("r", [0] * 64, prompt_embeds=rows))


def test_token_types_of_pooling_requests_count() -> None:
    told = [None, {"compressed_token_type_ids": 4}, {"compressed_token_type_ids": 5}]
    requests = [Request("r", TOKENS, pooling_params=SimpleNamespace(extra_kwargs=extra)) for extra in told]
    assert len({keys(request)[0] for request in requests}) == 3
    odd = Request("r", TOKENS, pooling_params=SimpleNamespace(extra_kwargs={"x": object()}))
    with pytest.raises(NotCacheableError, match="extra_kwargs: object has no encoding"):
        keys(odd)


def test_an_adapter_that_cannot_be_read_makes_a_request_not_cacheable(tmp_path: Path) -> None:
    request = Request("r", TOKENS, lora_request=LoRARequest("a", 1, str(tmp_path)))
    with pytest.raises(NotCacheableError, match="contains no weights"):
        keys(request)


@pytest.mark.parametrize(
    ("device", "lora", "cacheable"), [("cpu", True, False), ("cpu", False, True), ("cuda", True, True)]
)
def test_where_adapters_reach_other_requests_those_are_not_cacheable(
    tmp_path: Path, *, device: str, lora: bool, cacheable: bool
) -> None:
    """vLLM's LoRA on the CPU treats -1, for no adapter, as the index of the last one."""
    config = copy.deepcopy(CONFIG)
    config.device_config.device_type = device
    config.lora_config = SimpleNamespace(lora_dtype="float32") if lora else None
    with_adapter = Request("r", TOKENS, lora_request=LoRARequest("a", 1, str(write_adapter(tmp_path, b"A"))))
    assert keys(with_adapter, config)
    if cacheable:
        assert keys(Request("r", TOKENS), config) == keys(Request("r", TOKENS))
    else:
        with pytest.raises(NotCacheableError, match="without a LoRA adapter with the adapter of another request"):
            keys(Request("r", TOKENS), config)


class LaterRequest(Request):
    """A request of a future release."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], *, steering_vectors: Any = None) -> None:
        super().__init__(request_id, prompt_token_ids)
        self.steering_vectors = steering_vectors


def test_content_of_a_kind_that_we_do_not_know_is_not_cacheable() -> None:
    assert keys(LaterRequest("r", TOKENS)) == keys(Request("r", TOKENS))
    with pytest.raises(NotCacheableError, match="'steering_vectors', which UCM does not know"):
        keys(LaterRequest("r", TOKENS, steering_vectors=[1]))


def test_encodings_from_other_engines_are_found_by_name() -> None:
    config = copy.copy(CONFIG)
    config.ec_transfer_config = SimpleNamespace(ec_connector="ECExampleConnector")  # type: ignore[attr-defined]
    request = Request("r", TOKENS, mm_features=[image(CAT, 9)])
    with pytest.raises(NotCacheableError, match="ec_transfer_config"):
        keys(request, config)
    assert keys(request, config, trusting=True)
