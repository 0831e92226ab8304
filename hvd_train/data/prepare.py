"""Turn stored images into the input of the model, on the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_train.data.augment import Augment
from hvd_train.data.dataset import DataSet, Mark, unmarked


class Prepare:
    """Scales, resizes, augments and normalises whole batches of images, and repeats grey as three channels."""

    def __init__(
        self,
        data: DataSet,
        device: torch.device,
        *,
        image_size: int | None,
        augment: Augment | None,
        colour: bool,
        channels_last: bool = False,
    ) -> None:
        """`image_size` (pixels; None: as stored) is the side of the result; `colour` asks for three channels."""
        self.augment = augment
        self._size = image_size
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._channels = 3 if colour and data.channels == 1 else None
        self._normalises = len(data.mean) > 0
        # A tensor without dimensions is applied to all pixels in half the time.
        shape = () if len(data.mean) == 1 else (-1, 1, 1)
        self._mean, self._std = (torch.tensor(values, device=device).view(shape) for values in (data.mean, data.std))

    def __call__(self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked) -> Tensor:
        """Return model input [n, c, h, w] float for images [n, c, h, w], uint8 0..255 or float.

        `uniforms` [n, k] are the samples' random numbers for the augmentation, if any. `images` do not change.
        """
        layout = torch.contiguous_format  # decoders interleave the colours
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(255)
        else:
            images = images.clone(memory_format=layout)
        # In place from here: to allocate memory for a batch takes longer than the arithmetic.
        if self._size is not None and images.shape[-2:] != (self._size, self._size):
            images = F.interpolate(images, size=(self._size, self._size), mode="bilinear", antialias=True)
        if self.augment is not None and uniforms is not None:
            mark("prepare")
            images = self.augment.apply(images, uniforms)
            mark("augment")
        if self._normalises:
            grey_as_colour = images.shape[1] < len(self._mean.flatten())  # three results for each value
            images = (images - self._mean if grey_as_colour else images.sub_(self._mean)).div_(self._std)
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        if self._memory_format is torch.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        mark("prepare")
        return images
