"""The methods that oasis is compared with, under the same command and protocol, as their authors publish them."""
