"""The image that every contestant gets: a 500×375 JPEG of about 60 KB from a seeded texture, the same each time."""

import cv2
import numpy as np

WIDTH, HEIGHT = 500, 375
_TARGET_BYTES = 60_000


def photo() -> bytes:
    """Clouds of noise at six scales with a few hard edges: the spectrum, size and decoding cost of a photo."""
    random = np.random.default_rng(20)
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for octave in range(6):
        rows, columns = 3 * 2**octave, 4 * 2**octave
        noise = random.normal(0, 60 / 1.4**octave, (rows, columns, 3)).astype(np.float32)
        canvas += cv2.resize(noise, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    image = np.clip(canvas + 120, 0, 255).astype(np.uint8)
    for _ in range(12):
        centre = (int(random.integers(WIDTH)), int(random.integers(HEIGHT)))
        colour = tuple(int(value) for value in random.integers(0, 256, 3))
        cv2.circle(image, centre, int(random.integers(10, 60)), colour, int(random.integers(1, 6)), cv2.LINE_AA)
    sizes = {quality: _encode(image, quality) for quality in range(60, 100)}
    return min(sizes.values(), key=lambda encoded: abs(len(encoded) - _TARGET_BYTES))


def _encode(image: np.ndarray, quality: int) -> bytes:
    done, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise RuntimeError("OpenCV could not encode the test image")
    return encoded.tobytes()
