"""Programs for developing hackkv that are not part of the product."""
