"""What crosses a boundary: plain frozen data, no I/O. Import the submodule that you need."""
