"""What the simulator and the compiler know about accelerators and models: data files and the classes that hold them."""
