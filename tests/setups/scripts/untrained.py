"""A script that ends without a step."""

from models import Decoder, text

print(Decoder()(text(2)).sum())
