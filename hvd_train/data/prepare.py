"""From stored images to the input of the model, on the device."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from hvd_train.data.augment import Augment
from hvd_train.data.dataset import DataSet, Mark, unmarked
from hvd_train.data.trees import Tree, mapped

_LARGE = 2**14
"""Values of an image from which on calls for each image cost less than passes over a whole batch."""


class Preparation(Protocol):
    """Turns what a data set holds into the input of the model."""

    augment: Augment | None

    def __call__(
        self, inputs: Tree, uniforms: Tensor | None, mark: Mark = unmarked, *, overwrite: bool = False
    ) -> Tree:
        """Return model input for a batch of samples, augmented by their random numbers `uniforms` [n, k] if given.

        The result has memory of its own, since a loader process may fill that of the inputs anew, unless `overwrite`
        says that nobody else needs them.
        """

    def lay_out(self, inputs: Tree) -> Tree:
        """Return prepared inputs in the memory format of the model."""


class AsTheyAre(Preparation):
    """Leaves inputs as the data set has made them: tables, tokens, and whatever else is no image."""

    augment = None

    @override
    def __call__(
        self, inputs: Tree, uniforms: Tensor | None, mark: Mark = unmarked, *, overwrite: bool = False
    ) -> Tree:
        inputs = inputs if overwrite else mapped(Tensor.clone, inputs)
        mark("prepare")
        return inputs

    @override
    def lay_out(self, inputs: Tree) -> Tree:
        return inputs


class Prepare(Preparation):
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

    @override
    def __call__(
        self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked, *, overwrite: bool = False
    ) -> Tensor:
        """Return model input [n, c, h, w] float for images [n, c, h, w], uint8 0..255 or float."""
        if self._is_only_normalised(images, uniforms):
            images = self._one_by_one(images)
        else:
            images = self._all_at_once(images, uniforms, mark, overwrite)
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        images = self.lay_out(images)
        mark("prepare")
        return images

    def _is_only_normalised(self, images: Tensor, uniforms: Tensor | None) -> bool:
        """Return whether nothing else is to be done to these images, which are large ones on a CPU."""
        is_large = images.device.type == "cpu" and images.dtype == torch.uint8 and images[:1].numel() >= _LARGE
        is_sized = self._size is None or images.shape[-2:] == (self._size, self._size)
        return is_large and is_sized and self._normalises and (self.augment is None or uniforms is None)

    def _one_by_one(self, images: Tensor) -> Tensor:
        """Normalise each image while it is in the cache: a batch would be fetched from memory for each operation."""
        batch = torch.empty(images.shape)
        for image, pixels in zip(batch.unbind(), images.unbind(), strict=True):
            image.copy_(pixels).div_(255).sub_(self._mean).div_(self._std)
        return batch

    def _all_at_once(self, images: Tensor, uniforms: Tensor | None, mark: Mark, overwrite: bool) -> Tensor:
        # From here on in place: to allocate memory for a batch takes longer than the arithmetic.
        layout = torch.contiguous_format  # loader processes may send the colours of each pixel side by side
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(255)
        elif not overwrite:
            images = images.clone(memory_format=layout)
        if self._size is not None and images.shape[-2:] != (self._size, self._size):
            images = F.interpolate(images, size=(self._size, self._size), mode="bilinear", antialias=True)
        if self.augment is not None and uniforms is not None:
            mark("prepare")
            images = self.augment.apply(images, uniforms)
            mark("augment")
        return images.sub_(self._mean).div_(self._std) if self._normalises else images

    @override
    def lay_out(self, images: Tensor) -> Tensor:
        """Return the images in the memory format of the model: a copy for channels_last, else the images themselves."""
        is_usual = self._memory_format is torch.contiguous_format
        return images if is_usual else images.contiguous(memory_format=self._memory_format)
