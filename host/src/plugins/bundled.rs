//! The standard plugins, inside the program: a run needs no file and no wasm toolchain for them.

/// Name and bytes of each, in the order of a listing.
pub const BUNDLED: [(&str, &[u8]); 18] = [
    ("bucket-to-pair", include_bytes!("../../../plugins/dist/bucket-to-pair.wasm")),
    ("in-order", include_bytes!("../../../plugins/dist/in-order.wasm")),
    ("packed", include_bytes!("../../../plugins/dist/packed.wasm")),
    ("shuffled", include_bytes!("../../../plugins/dist/shuffled.wasm")),
    ("token-budget", include_bytes!("../../../plugins/dist/token-budget.wasm")),
    ("every-n-steps", include_bytes!("../../../plugins/dist/every-n-steps.wasm")),
    ("wall-clock", include_bytes!("../../../plugins/dist/wall-clock.wasm")),
    ("plateau", include_bytes!("../../../plugins/dist/plateau.wasm")),
    ("window", include_bytes!("../../../plugins/dist/window.wasm")),
    ("keep-all", include_bytes!("../../../plugins/dist/keep-all.wasm")),
    ("length-and-dedup", include_bytes!("../../../plugins/dist/length-and-dedup.wasm")),
    ("regex-filter", include_bytes!("../../../plugins/dist/regex-filter.wasm")),
    ("one-run-grant", include_bytes!("../../../plugins/dist/one-run-grant.wasm")),
    ("strict", include_bytes!("../../../plugins/dist/strict.wasm")),
    ("gguf", include_bytes!("../../../plugins/dist/gguf.wasm")),
    ("merge-bf16", include_bytes!("../../../plugins/dist/merge-bf16.wasm")),
    ("merge-then-quantize", include_bytes!("../../../plugins/dist/merge-then-quantize.wasm")),
    ("peft-adapter", include_bytes!("../../../plugins/dist/peft-adapter.wasm")),
];

/// The bytes of the bundled plugin of this name.
pub fn find(name: &str) -> Option<&'static [u8]> {
    BUNDLED.iter().find(|(bundled, _)| *bundled == name).map(|&(_, bytes)| bytes)
}
