//! NVIDIA's compiler and disassembler from their PyPI wheels: what becomes of CUDA C++ on an architecture, without one.

use libloading::{Library, Symbol};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with `lib`, `include` and `bin`, as the wheels lay them out.
pub struct Toolkit {
    root: PathBuf,
    nvrtc: Library,
}

/// A kernel as machine code.
pub struct Machine {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread outside its registers: what was spilled, and arrays indexed at run time.
    pub spilled_bytes: u32,
    /// How often each instruction is there, by its name up to the first dot: `HMMA`, `LDSM`.
    pub instructions: BTreeMap<String, usize>,
}

type Program = *mut c_void;

impl Toolkit {
    /// The toolkit in `root`.
    pub fn open(root: &Path) -> Self {
        let path = root.join("lib/libnvrtc.so.13");
        // SAFETY: NVIDIA's library, whose initialisation asks nothing of the process.
        let nvrtc = unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { root: root.into(), nvrtc }
    }

    /// Compiles `source` for compute capability `sm` with the options of cubecl's runtime.
    ///
    /// # Panics
    /// With the compiler's log, if it refuses.
    pub fn compile(&self, source: &str, sm: u32) -> Machine {
        let options = [
            format!("--gpu-architecture=sm_{sm}a"),
            format!("--include-path={}", self.root.join("include").display()),
            format!("--include-path={}", self.root.join("include/cccl").display()),
            "-lineinfo".into(),
        ];
        let cubin = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(cubin.path(), self.cubin(source, &options)).unwrap();
        let usage = self.tool("cuobjdump", &["-res-usage"], cubin.path());
        let number = |key: &str| -> u32 {
            let (_, rest) = usage.split_once(key).unwrap_or_else(|| panic!("no {key} in {usage}"));
            rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
        };
        let mut instructions = BTreeMap::new();
        for line in self.tool("nvdisasm", &["-c"], cubin.path()).lines() {
            // An instruction is `/*0040*/ @!P0 HMMA.16816.F32.BF16 R4, ... ;`, perhaps under a predicate.
            let Some((address, rest)) = line.trim().strip_prefix("/*").and_then(|line| line.split_once("*/")) else {
                continue;
            };
            if address.len() == 4 || address.len() == 5 {
                let name = rest.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
                let name = name.split(['.', ';']).next().unwrap_or_default();
                *instructions.entry(name.to_string()).or_default() += 1;
            }
        }
        Machine { registers: number("REG:"), spilled_bytes: number("STACK:") + number("LOCAL:"), instructions }
    }

    fn tool(&self, name: &str, options: &[&str], file: &Path) -> String {
        let bin = self.root.join("bin").join(name);
        let out =
            Command::new(&bin).args(options).arg(file).output().unwrap_or_else(|e| panic!("{}: {e}", bin.display()));
        assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    fn cubin(&self, source: &str, options: &[String]) -> Vec<u8> {
        let source = CString::new(source).unwrap();
        let options: Vec<CString> = options.iter().map(|option| CString::new(option.as_str()).unwrap()).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const c_void,
            *const c_void,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: the signatures are those of nvrtc.h; the strings outlive the calls, and the program is used until it is
        // destroyed and not afterwards.
        unsafe {
            let create: Symbol<Create> = self.nvrtc.get(b"nvrtcCreateProgram").unwrap();
            let compile: Symbol<Compile> = self.nvrtc.get(b"nvrtcCompileProgram").unwrap();
            let destroy: Symbol<Destroy> = self.nvrtc.get(b"nvrtcDestroyProgram").unwrap();
            let mut program = std::ptr::null_mut();
            let none = std::ptr::null();
            assert_eq!(create(&mut program, source.as_ptr(), c"kernel.cu".as_ptr(), 0, none, none), 0);
            let refused = compile(program, options.len() as c_int, options.as_ptr()) != 0;
            let what = if refused {
                ["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"]
            } else {
                ["nvrtcGetCUBINSize", "nvrtcGetCUBIN"]
            };
            let bytes = self.bytes(program, what);
            destroy(&mut program);
            assert!(!refused, "{}\n{}", String::from_utf8_lossy(&bytes), source.to_string_lossy());
            bytes
        }
    }

    /// What one function of NVRTC tells the size of, and the other writes.
    ///
    /// # Safety
    /// `program` is one, and the functions are such a pair.
    unsafe fn bytes(&self, program: Program, [size, content]: [&str; 2]) -> Vec<u8> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Content = unsafe extern "C" fn(Program, *mut u8) -> c_int;
        // SAFETY: as the caller promises; the buffer has the size that was told.
        unsafe {
            let size: Symbol<Size> = self.nvrtc.get(size.as_bytes()).unwrap();
            let content: Symbol<Content> = self.nvrtc.get(content.as_bytes()).unwrap();
            let mut len = 0;
            assert_eq!(size(program, &mut len), 0);
            let mut bytes = vec![0; len];
            assert_eq!(content(program, bytes.as_mut_ptr()), 0);
            bytes
        }
    }
}
