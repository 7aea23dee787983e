"""Writers for weight file formats, one file each: they plan the files, and the place of every value in them."""
