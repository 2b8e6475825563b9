"""The healthy runs of the unseen set."""

from __future__ import annotations

from benchmarks.alarms.healthy_cases import healthy_case
from benchmarks.alarms.kinds.setup import restarts, warmup_cosine, warmup_stable_decay
from benchmarks.alarms.unseen import perception as p
from benchmarks.alarms.unseen import reasoning as r
from benchmarks.alarms.unseen import schedules as s

COSINE, WSD = warmup_cosine(300), warmup_stable_decay(300)

UNSEEN_HEALTHY = (
    healthy_case("sounds", "sounds", p.sounds, schedule=COSINE),
    healthy_case("sounds-mixup", "sounds", p.sounds, mixup=0.4, smoothing=0.2, lr=1e-3),
    healthy_case("sounds-huge-loss", "sounds", p.sounds, scale=1e7, optimizer="nadam", lr=2e-3),
    healthy_case("sounds-tiny-loss", "sounds", p.sounds, scale=1e-5, clip=None, schedule=WSD),
    healthy_case("sounds-decay", "sounds", p.sounds, decay=1.0, lr=3e-3, schedule=COSINE),
    healthy_case("sounds-accumulated", "sounds", p.sounds, accumulate=4, optimizer="radam"),
    healthy_case("sounds-unshuffled", "sounds", p.sounds, batches=10, optimizer="sgd", lr=0.1),
    healthy_case("binary-weights", "binary-weights", p.binary_weights),
    healthy_case("spiking", "spiking", p.spiking, optimizer="adamax", lr=5e-3),
    healthy_case("image-prior", "image-prior", p.image_prior, clip=None, lr=1e-2),
    healthy_case("distance-field", "distance-field", p.distance_field, schedule=COSINE),
    healthy_case("growing", "growing", p.growing),
    healthy_case("gradient-penalty", "gradient-penalty", p.gradient_penalty),
    healthy_case("mean-teacher", "mean-teacher", p.mean_teacher),
    healthy_case("freezing", "freezing", s.freezing),
    healthy_case("freezing-sgd", "freezing", s.freezing, optimizer="nesterov", lr=0.05),
    healthy_case("turns", "turns", s.turns),
    healthy_case("turns-long", "turns", s.turns, 400, period=100, optimizer="sgd", lr=0.03),
    healthy_case("two-kinds", "two-kinds", s.two_kinds),
    healthy_case("sparse-tables", "sparse-tables", s.sparse_tables),
    healthy_case("few-spectra", "spectra", s.spectra, batches=4, lr=1e-3, decay=0.1),
    healthy_case("parity", "parity", r.parity, 500, optimizer="sgd", lr=0.1, clip=None),
    healthy_case("parity-adam", "parity", r.parity, 400, lr=3e-3),
    healthy_case("faint", "faint", r.faint),
    healthy_case("faint-sgd", "faint", r.faint, optimizer="sgd", lr=0.01, schedule=COSINE),
    healthy_case("control", "control", r.control),
    healthy_case("control-restarts", "control", r.control, schedule=restarts(75), lr=1e-2),
    healthy_case("tiny-units", "tiny-targets", r.tiny_targets),
    healthy_case("information", "information", r.information, clip=None, lr=1e-3),
    healthy_case("molecules", "molecules", r.molecules, schedule=WSD),
    healthy_case("offline-values", "offline-values", r.offline_values),
    healthy_case("retention", "retention", r.retention, optimizer="lion", lr=1e-3),
    healthy_case("retention-lengthened", "retention", r.retention, lengthen=True, schedule=WSD),
)
