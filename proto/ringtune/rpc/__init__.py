"""Between values and messages: channel options and codecs."""
