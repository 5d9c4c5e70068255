"""Statistics of models on data: `python -m mecha_exp calibrate` writes them, merges read them."""

from mecha_exp.calibration.loader import load_subject
from mecha_exp.calibration.masks import Training, train_mask
from mecha_exp.calibration.measurement import Request, calibrate
from mecha_exp.calibration.recalibration import recalibrate
from mecha_exp.calibration.scaled_fisher import calibrate_scaled
from mecha_exp.calibration.sequential_grams import Expert, calibrate_along_merge
from mecha_exp.calibration.subject import LABELS, Subject

__all__ = [
    "LABELS",
    "Expert",
    "Request",
    "Subject",
    "Training",
    "calibrate",
    "calibrate_along_merge",
    "calibrate_scaled",
    "load_subject",
    "recalibrate",
    "train_mask",
]
