"""An extension of backlight: how often gradients change their sign."""
