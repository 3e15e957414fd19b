"""Compressed images in observations: decoded to what was encoded, and never before their size is known."""

from typing import Any

import numpy as np
import pytest

from omni_live.protocols.fields import Faulty
from omni_live.protocols.images import MAX_PIXELS, decode_images, encode_image, has_images
from omni_live.protocols.openpi.codec import pack, unpack

ROWS, COLUMNS = np.mgrid[0:48, 0:64]
SMOOTH = np.stack([ROWS * 4, COLUMNS * 3, (ROWS + COLUMNS) * 2], axis=2).astype(np.uint8)


def decoded(observation: Any) -> Any:
    return decode_images(unpack(pack(observation)))


def refusal(observation: Any) -> str:
    with pytest.raises(Faulty) as caught:
        decoded(observation)
    assert caught.value.fault.code == "bad_image"
    return caught.value.fault.message


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_comes_back_as_it_was(channels: int) -> None:
    image = np.resize(SMOOTH, (48, 64, channels))
    encoded = encode_image(image, quality=None)
    assert encoded["format"] == "png"
    found = decoded({"image": encoded})["image"]
    assert np.array_equal(found, image)
    assert found.dtype == np.uint8 and found.flags.writeable


@pytest.mark.parametrize("channels", [1, 3])
def test_a_jpeg_comes_back_nearly_as_it_was(channels: int) -> None:
    image = np.ascontiguousarray(SMOOTH[:, :, :channels])
    encoded = encode_image(image)
    assert encoded["format"] == "jpeg"
    found = decoded({"image": encoded})["image"]
    assert found.shape == image.shape
    assert np.abs(found.astype(int) - image).mean() < 3


def test_an_image_of_four_channels_is_a_png_whatever_the_quality() -> None:
    assert encode_image(np.resize(SMOOTH, (48, 64, 4)), quality=50)["format"] == "png"


def test_a_lower_quality_takes_fewer_bytes() -> None:
    sizes = [len(pack(encode_image(SMOOTH, quality))) for quality in (30, 90)]
    assert sizes[0] < sizes[1] < SMOOTH.nbytes


@pytest.mark.parametrize(
    "image",
    [SMOOTH.astype(np.float32), SMOOTH[:, :, 0], SMOOTH[:, :, :2], SMOOTH[:0], SMOOTH[None]],
    ids=["floats", "two dimensions", "two channels", "no rows", "a batch"],
)
def test_what_is_no_image_is_not_encoded(image: Any) -> None:
    with pytest.raises(ValueError, match="an image is a uint8 array"):
        encode_image(image)


def test_images_are_found_and_decoded_in_maps_within_maps() -> None:
    observation = {"images": {"left": encode_image(SMOOTH, None), "right": SMOOTH}, "state": [1, 2], "prompt": "push"}
    assert has_images(observation)
    found = decoded(observation)
    assert np.array_equal(found["images"]["left"], SMOOTH)
    assert np.array_equal(found["images"]["right"], SMOOTH)
    assert (found["state"], found["prompt"]) == ([1, 2], "push")


@pytest.mark.parametrize("observation", [{}, {"image": SMOOTH, "state": {"deep": [1]}}, [1], None, SMOOTH, "text"])
def test_an_observation_without_images_has_none_and_stays_as_it_is(observation: Any) -> None:
    assert not has_images(observation)
    assert repr(decode_images(observation)) == repr(observation)


def test_the_observation_that_was_given_is_not_changed() -> None:
    observation = {"image": encode_image(SMOOTH)}
    decode_images(observation)
    assert has_images(observation)


def test_all_images_of_an_observation_share_one_cap() -> None:
    observation = {"a": encode_image(SMOOTH), "b": {"c": encode_image(SMOOTH)}}
    assert has_images(observation)
    pixels = 2 * 48 * 64
    decode_images(observation, max_pixels=pixels)
    with pytest.raises(Faulty, match=f"more than {pixels - 1} pixels"):
        decode_images(observation, max_pixels=pixels - 1)


def test_three_cameras_of_1080p_are_within_the_cap() -> None:
    assert MAX_PIXELS >= 3 * 1080 * 1920


def test_a_shape_that_is_not_the_images_is_refused() -> None:
    encoded = encode_image(SMOOTH)
    for shape in ([64, 48, 3], [48, 64, 1], [48, 64]):
        assert "'shape'" in refusal({"image": {**encoded, "shape": shape}})


def test_the_decoders_own_words_stay_here() -> None:
    assert (
        refusal({"image": {**encode_image(SMOOTH), "data": b"\xff\xd8\xff garbage"}}) == "An image cannot be decoded."
    )
