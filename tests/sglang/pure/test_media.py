"""Which servers compare the names of their images, and what these names are."""

from types import SimpleNamespace

import pytest

from kvconnector.integrations.sglang.media import feature_namespace, media_name

OPTIONS = {"mm_feature_transport": None, "image_processor_backend": "auto"}
MADE_BY = ("1.0", "cpu")


def _namespace(options=(), environ=(), made_by=MADE_BY):
    return feature_namespace(OPTIONS | dict(options), dict(environ), made_by=made_by)


@pytest.mark.parametrize(
    "change, is_other",
    [
        ({}, False),
        ({"environ": {"HOME": "/a", "SGLANG_HOST_IP": "10.0.0.1", "POD_IMAGE": "b"}}, False),
        ({"options": {"mm_attention_backend": "sdpa", "mm_io_worker_num": 3}}, False),
        ({"environ": {"SGLANG_IMAGE_MAX_PIXELS": "9"}}, True),
        ({"environ": {"VIDEO_MAX_PIXELS": "9"}}, True),
        ({"options": {"image_processor_backend": "pil"}}, True),
        ({"options": {"a_new_option": 1}}, True),
        ({"made_by": ("1.1", "cpu")}, True),
        ({"made_by": ("1.0", "H100")}, True),
    ],
    ids=str,
)
def test_servers_whose_features_may_differ_have_namespaces_of_their_own(change, is_other):
    assert _namespace()
    assert (_namespace(**change) != _namespace()) == is_other


@pytest.mark.parametrize(
    "change",
    [
        {"environ": {"SGLANG_MM_SKIP_COMPUTE_HASH": "true"}},
        {"options": {"mm_feature_transport": "cuda_ipc"}},
    ],
    ids=str,
)
def test_a_server_that_names_one_image_in_two_ways_compares_none(change):
    assert _namespace(**change) == ""


def _items(*found):
    return [SimpleNamespace(modality=SimpleNamespace(name=kind), hash=each) for kind, each in found]


def test_images_and_videos_have_names_and_audio_is_only_counted():
    image, other = _items(("IMAGE", 1)), _items(("IMAGE", 2))
    assert media_name(image, "n") == media_name(_items(("IMAGE", 1)), "n")
    assert media_name(image, "n") != media_name(other, "n")
    assert media_name(image + other, "n") != media_name(other + image, "n")
    assert media_name(image, "n") != media_name(_items(("VIDEO", 1)), "n")
    sounds = _items(("AUDIO", 1)), _items(("AUDIO", 2)), _items(("AUDIO", 1), ("AUDIO", 1))
    one, equal, more = (media_name(each, "n") for each in sounds)
    assert one == equal != more
    assert media_name(image, "") == media_name(other, "")
