"""torchfrtrace's output as a rendering of `diagnose`: `problems` finds what it would print, `render` writes the lines."""
