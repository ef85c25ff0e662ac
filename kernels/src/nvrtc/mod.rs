//! What NVIDIA's compiler makes of every kernel that a CUDA device would run, found without one.
//!
//! The operations are called at the production shapes on a device that records what it is asked to launch, and each kernel
//! goes through NVRTC as cubecl's CUDA runtime would send it. `--nocapture` shows the table of what came out.

mod cases;
mod recorder;
mod toolkit;

use crate::gpu::Adapter;
#[cfg(feature = "cuda")]
use crate::gpu::LaunchedKernels;
use crate::resolve::{self, Dtypes};
use burn::tensor::DType;
use cases::{DTYPES, cases};
use recorder::{ARCHS, Arch, Launch, On, Recorder};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::path::Path;
use toolkit::{Machine, Toolkit};

/// Shared memory of a block on the production target, which every kernel must fit whatever it is compiled for.
const SHARED_BYTES_MAX: usize = ARCHS[0].shared_bytes_max;

/// Kernels whose work is matrix products. With weights in bf16 they are those on matrix instructions, `Mma`.
const MATRIX_KERNELS: [&str; 7] =
    ["Matmul", "MmaProduct", "Forward", "BackwardQueries", "BackwardKeys", "MmaForward", "MmaBackward"];

/// What bounds a kernel on one card.
struct Card {
    name: &'static str,
    f32_per_s: f64,
    bf16_per_s: f64,
    bytes_per_s: f64,
    threads_per_sm: u32,
    blocks_per_sm: u32,
    shared_per_sm: usize,
}

/// Dense rates from NVIDIA's data sheets; limits of a multiprocessor from the CUDA programming guide.
fn card(arch: Arch) -> Card {
    match arch.sm {
        120 => Card {
            name: "RTX PRO 6000 Blackwell",
            f32_per_s: 125e12,
            bf16_per_s: 503e12,
            bytes_per_s: 1.79e12,
            threads_per_sm: 1_536,
            blocks_per_sm: 24,
            shared_per_sm: 100 << 10,
        },
        _ => Card {
            name: "H100 SXM",
            f32_per_s: 67e12,
            bf16_per_s: 989e12,
            bytes_per_s: 3.35e12,
            threads_per_sm: 2_048,
            blocks_per_sm: 32,
            shared_per_sm: 228 << 10,
        },
    }
}

impl Card {
    /// Share of a multiprocessor's threads that its registers and shared memory let stay at once.
    fn occupancy(&self, launch: &Launch, machine: &Machine) -> f64 {
        // Registers are given to a warp in units of 256, shared memory to a block with 1 KiB of the system's.
        let by_registers = 65_536 / ((machine.registers * 32).next_multiple_of(256) * launch.threads / 32);
        let by_shared = (self.shared_per_sm / (launch.shared_bytes + 1_024)) as u32;
        let blocks = by_registers.min(by_shared).min(self.blocks_per_sm).min(self.threads_per_sm / launch.threads);
        f64::from(blocks * launch.threads) / f64::from(self.threads_per_sm)
    }
}

/// One line of the table, and what is wrong with the kernel.
fn row(case: &str, launch: &Launch, flops: Option<f64>, arch: Arch, machine: &Machine) -> (String, Vec<String>) {
    let card = card(arch);
    let count = |name: &str| machine.instructions.get(name).copied().unwrap_or(0);
    let on_matrix_units = count("HMMA") > 0;
    let rate = if on_matrix_units { card.bf16_per_s } else { card.f32_per_s };
    let (compute, memory) = (flops.unwrap_or(0.0) / rate, launch.buffer_bytes as f64 / card.bytes_per_s);
    let bound = if compute > memory { "compute" } else { "memory" };
    let line = format!(
        "| {case} | {} | {} | {} | {} | {:.0}% | {} | {} | {} | {} | {:.2} | {:.1} | {bound} {:.3} ms |",
        launch.variant,
        machine.registers,
        machine.spilled_bytes,
        launch.shared_bytes,
        100.0 * card.occupancy(launch, machine),
        count("HMMA"),
        count("LDSM"),
        count("LDGSTS"),
        count("FFMA"),
        launch.buffer_bytes as f64 / 1e9,
        flops.unwrap_or(0.0) / 1e9,
        1e3 * compute.max(memory),
    );
    let mut faults = Vec::new();
    let mut fault = |what: String| faults.push(format!("{case}: {} for sm_{}: {what}", launch.variant, arch.sm));
    if machine.spilled_bytes > arch.spilled_bytes_max {
        let most = arch.spilled_bytes_max;
        fault(format!("{} bytes of a thread are not in registers, {most} at most", machine.spilled_bytes));
    }
    if launch.shared_bytes > SHARED_BYTES_MAX {
        fault(format!("{} bytes of shared memory, {SHARED_BYTES_MAX} at most", launch.shared_bytes));
    }
    if launch.name.starts_with("Mma") {
        // The multiplication, the loads of its fragments, and the asynchronous copy.
        for instruction in ["HMMA", "LDSM", "LDGSTS"].into_iter().filter(|name| count(name) == 0) {
            fault(format!("no {instruction}"));
        }
    }
    (line, faults)
}

/// The hash under which a run's provenance keeps what its kernels resolve to on the device behind `on`.
fn resolved_sha256(on: &On, dtypes: Dtypes) -> String {
    let table = Adapter::new(&on.0).kernels(dtypes).expect("a card computes in it");
    resolve::sha256(table.iter().map(|(kernel, by)| (*kernel, &by[..])))
}

/// The rows of an architecture, each variant once, and the faults of all.
fn table(toolkit: &Toolkit, arch: Arch) -> (String, Vec<String>) {
    let recorder = Recorder::new(arch);
    let [f32, mixed, bf16] = DTYPES.map(|dtypes| resolved_sha256(&recorder.on, dtypes));
    let mut text = format!(
        "\n## sm_{}, bounds for an {}\n\n\
         `kernels_sha256` of a run: {f32} in f32, {mixed} with frozen matrices in bf16, {bf16} with activations in bf16 too.\n\n\
         | operation | kernel | registers | spilled B | shared B | occupancy | HMMA | LDSM | LDGSTS | FFMA | GB | GFLOP | bound |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        arch.sm,
        card(arch).name
    );
    let (mut seen, mut faults) = (HashSet::new(), Vec::new());
    for dtypes in DTYPES {
        for case in cases(dtypes) {
            (case.run)(&recorder.on);
            let mut flops = case.flops.into_iter();
            for launch in recorder.take() {
                let flops =
                    MATRIX_KERNELS.contains(&launch.name).then(|| flops.next().expect("a matrix kernel's work"));
                if dtypes.weights == DType::BF16 && flops.is_some() && !launch.name.starts_with("Mma") {
                    faults.push(format!("{}: {} with weights in bf16", case.name, launch.variant));
                }
                if seen.insert(launch.variant.clone()) {
                    let machine = toolkit.compile(&launch.source, arch.sm);
                    let (line, wrong) = row(case.name, &launch, flops, arch, &machine);
                    writeln!(text, "{line}").unwrap();
                    faults.extend(wrong);
                }
            }
            assert_eq!(flops.next(), None, "{}: a matrix kernel was not launched", case.name);
        }
    }
    (text, faults)
}

fn toolkit() -> Toolkit {
    let root = std::env::var_os("TUNEHOST_CUDA_TOOLKIT")
        .expect("TUNEHOST_CUDA_TOOLKIT: nvidia/cu13 in the folder of tests/nvidia-compiler");
    Toolkit::open(Path::new(&root))
}

#[test]
fn what_a_kernel_takes_is_read_from_its_machine_code() {
    // Values that are indexed at run time have no place in registers.
    let source = r#"
        extern "C" __global__ void k(float *x, int n) {
            float own[256];
            for (int i = 0; i < 256; i++) own[i * n & 255] = x[i];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};"
                : "+f"(own[0]), "+f"(own[1]), "+f"(own[2]), "+f"(own[3]) : "r"(n));
            x[threadIdx.x] = own[n & 255];
        }"#;
    for arch in ARCHS {
        let machine = toolkit().compile(source, arch.sm);
        assert_eq!(machine.spilled_bytes, 1_024);
        assert_eq!(machine.instructions["HMMA"], 1);
        assert!((1..=255).contains(&machine.registers));
    }
}

#[test]
fn products_with_weights_in_bf16_resolve_to_matrix_instructions() {
    let [blackwell, hopper] = ARCHS.map(|arch| {
        let recorder = Recorder::new(arch);
        DTYPES
            .map(|dtypes| BTreeMap::from(Adapter::new(&recorder.on.0).kernels(dtypes).expect("a card computes in it")))
    });
    assert_eq!(blackwell, hopper, "a card of either architecture takes the same kernels");
    let [f32, mixed, bf16] = &blackwell;
    for kernel in ["windowed_attention", "lora_linear", "moe_experts", "linear_cross_entropy"] {
        assert_eq!((f32[kernel].as_str(), mixed[kernel].as_str()), ("cubecl-f32-cuda", "cubecl-bf16-mma-cuda"));
        assert_eq!(bf16[kernel], "cubecl-bf16-mma-cuda, bf16 in and out");
    }
}

/// By the hash of each variant; nothing is run, though the card's own compiler takes every one.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a card, and a process of its own: tests/gpu/bench"]
fn a_card_launches_the_very_variants_that_are_compiled_without_one() {
    let card = On(cubecl::Device::cuda(0).expect("a card").client());
    let fingerprint = card.0.properties().identity.fingerprint.clone();
    let arch = ARCHS.into_iter().find(|arch| fingerprint.ends_with(&arch.sm.to_string()));
    let recorder = Recorder::new(arch.unwrap_or_else(|| panic!("{fingerprint} is none of {ARCHS:?}")));
    let _dry = cubecl_runtime::dry_run::DryRun::new();
    for dtypes in DTYPES {
        assert_eq!(resolved_sha256(&card, dtypes), resolved_sha256(&recorder.on, dtypes));
        for case in cases(dtypes) {
            let [on_card, recorded] = [&card, &recorder.on].map(|on| {
                let launched = LaunchedKernels::new();
                (case.run)(on);
                cubecl::future::block_on(on.0.sync()).expect("every kernel compiles");
                launched.finish()
            });
            assert_eq!(on_card, recorded, "{} with {dtypes:?}", case.name);
        }
    }
}

#[test]
fn every_kernel_fits_the_registers_and_the_shared_memory_of_the_target() {
    let toolkit = toolkit();
    let parts = std::thread::scope(|scope| {
        let toolkit = &toolkit;
        ARCHS.map(|arch| scope.spawn(move || table(toolkit, arch))).map(|part| part.join().unwrap())
    });
    let faults: Vec<_> = parts.iter().flat_map(|(_, faults)| faults.clone()).collect();
    let text: String = std::iter::once(HEADER).chain(parts.iter().map(|(text, _)| text.as_str())).collect();
    println!("{text}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

const HEADER: &str = "# Every cubecl kernel, as NVIDIA's compiler leaves it\n\n\
    Gemma-4 26B-A4B, one row of 16,384 tokens, frozen matrices and activations in f32 and in bf16, each\n\
    variant once, at the first operation that asks for it; its name ends with a hash of what it was specialised on. NVRTC 13.5.\n\
    Spilled: bytes of a thread outside its registers. Occupancy: threads of a multiprocessor at once. Bound: what one pass\n\
    over the buffers or the arithmetic alone would take on such a card, by its data sheet; nothing here was run.\n";
