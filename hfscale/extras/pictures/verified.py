"""The parity cases by which vision-language models are verified."""

from ...testing.verify import ParityCases
from .picture_configs import with_pictures
from .picture_parity import PictureCase, PlainPictureCase

CASES = ParityCases(clone=with_pictures, by_step=PictureCase, by_loop=PlainPictureCase)
