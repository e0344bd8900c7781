from .roi_align import RoIAlign, roi_align
