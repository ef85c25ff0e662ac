//! A device without hardware: its runtime compiles what is launched to CUDA C++, as cubecl's CUDA runtime does, and keeps
//! it instead of running it. Memory is not allocated, so the production shapes cost nothing.

use crate::cube::empty;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::cmma::MatrixLayout;
use cubecl::ir::features::Plane;
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties, VectorSize,
};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    BufferBinding, CopyDescriptor, IoError, KernelArguments, KernelResource, MemoryLayout, ProfileError,
    ProfilingToken, Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl::{CompilationError, Compiler, CubeKernel, MemoryAllocationMode, define_kernel};
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda};
use cubecl_cpp::cuda::supported_mma_combinations;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features, register_wmma_features,
};
use cubecl_cpp::{register_supported_types, target::Cuda};
use cubecl_environment::bytes::Bytes;
use cubecl_environment::future::DynFut;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::dry_run::LaunchMode;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, StreamMemoryReport};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};
use cubecl_server::allocator::PitchedMemoryLayoutPolicy;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A GPU as the compiler and the bounds of a kernel see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arch {
    /// Compute capability, major and minor digits: 120.
    pub sm: u32,
    /// Shared memory that a block may ask for.
    pub shared_bytes_max: usize,
    /// Bytes of a thread that a kernel may keep outside its registers.
    pub spilled_bytes_max: u32,
}

/// The production target, and what its kernels must also run on. There the compiler gives up two values of one kernel, for more blocks
/// at once.
pub const ARCHS: [Arch; 2] = [
    Arch { sm: 120, shared_bytes_max: 101_376, spilled_bytes_max: 0 },
    Arch { sm: 90, shared_bytes_max: 232_448, spilled_bytes_max: 8 },
];

/// A kernel as it was launched.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The kernel's function.
    pub name: &'static str,
    /// Its variant: what cubecl calls the entry, with a hash of all that it was specialised on.
    pub variant: String,
    /// Its CUDA C++.
    pub source: String,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of all its buffers, each once: one may stand in for another that is absent.
    pub buffer_bytes: u64,
}

static LAUNCHES: Mutex<Vec<(u32, Launch)>> = Mutex::new(Vec::new());

/// A device of CUDA, recording or real, as operations see it.
pub struct On(pub Client);

impl On {
    /// A tensor on it, with no values, laid out as one that is read to the device.
    pub fn tensor(&self, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
        let shape = shape.into();
        let MemoryLayout { memory, strides } = self.0.empty_tensor(shape.clone(), dtype.size());
        // The name of the device is never asked: launches go to the client.
        let device = cubecl::Device::Cuda(Default::default());
        let mut tensor = CubeTensor::new_contiguous(self.0.clone(), device, shape, memory, dtype);
        *tensor.meta.strides_mut() = strides;
        tensor
    }

    /// One as an operation leaves its result: without gaps between rows.
    pub fn result(&self, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
        empty(&self.tensor([1], dtype), shape, dtype)
    }
}

/// The device of `arch` that records.
pub struct Recorder {
    /// What operations are called on.
    pub on: On,
    arch: Arch,
}

impl Recorder {
    /// The one of `arch`; every call gives the same.
    pub fn new(arch: Arch) -> Self {
        Self { on: On(Client::load::<RecordingServer>(DeviceId::new(0, arch.sm as u16))), arch }
    }

    /// Everything launched on it since this was last asked, in order.
    pub fn take(&self) -> Vec<Launch> {
        cubecl::future::block_on(self.on.0.sync()).expect("a kernel that does not compile to CUDA C++");
        let mut launches = LAUNCHES.lock().unwrap();
        launches.extract_if(.., |(sm, _)| *sm == self.arch.sm).map(|(_, launch)| launch).collect()
    }
}

/// A kernel as CUDA C++.
#[derive(Debug, Clone)]
struct Compiled {
    variant: String,
    source: String,
    shared_bytes: usize,
}

#[derive(Debug)]
struct RecordingServer {
    arch: CudaArchitecture,
    utilities: Arc<ServerUtilities>,
    compiled: HashMap<KernelId, Compiled>,
    failed: Option<String>,
}

impl RecordingServer {
    fn compile(&mut self, kernel: &dyn CubeKernel) -> Result<Compiled, CompilationError> {
        if let Some(compiled) = self.compiled.get(&kernel.id()) {
            return Ok(compiled.clone());
        }
        let options = CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: true,
                fast_math: true,
                fast_tanh: true,
                elect_sync: true,
                dp4a: true,
            },
            amd_wmma: None,
        };
        let definition = define_kernel(kernel)?;
        let variant = definition.settings.kernel_name.clone();
        let made = CppCompiler::<Cuda>::default().compile(definition, &options)?;
        let compiled = Compiled { variant, source: made.to_string(), shared_bytes: made.shared_memory_size };
        self.compiled.insert(kernel.id(), compiled.clone());
        Ok(compiled)
    }
}

/// What cubecl's CUDA runtime says of a device of this architecture, as far as kernels ask.
fn properties(arch: Arch) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: arch.shared_bytes_max,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: "recorder".into(), fingerprint: format!("sm_{}", arch.sm), physical: None };
    let memory = MemoryDeviceProperties::new(1 << 40, 512);
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
    register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    for plane in [Plane::Sync, Plane::Ops, Plane::NonUniformControlFlow] {
        properties.features.plane.insert(plane);
    }
    for half in [FloatKind::F16, FloatKind::BF16] {
        properties.features.matmul.ldmatrix.insert(ElemType::Float(half));
        properties.features.matmul.stmatrix.insert(ElemType::Float(half));
    }
    properties.features.copy_async = true;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    let cuda = CudaArchitecture { version: arch.sm, tensor_cores: true };
    register_wmma_features(CudaCmmaCompiler::Cpp.supported_cmma_combinations(&cuda), &mut properties);
    register_mma_features(supported_mma_combinations(&cuda), &mut properties);
    properties
}

fn target_properties() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}

impl DeviceService for RecordingServer {
    fn init(device_id: DeviceId) -> Self {
        let arch = *ARCHS.iter().find(|arch| arch.sm == u32::from(device_id.index_id)).expect("a known architecture");
        let (utilities, _) = ServerUtilities::init(
            ServiceId::of::<Self>(device_id),
            "cuda",
            properties(arch),
            target_properties(),
            Arc::new(ServerLogger::default()),
            PitchedMemoryLayoutPolicy::new(512),
        );
        let arch = CudaArchitecture { version: arch.sm, tensor_cores: true };
        Self { arch, utilities: Arc::new(utilities), compiled: HashMap::new(), failed: None }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for RecordingServer {}

impl Server for RecordingServer {
    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(&mut self, _: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        panic!("what was not computed cannot be read")
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        let failed = self.failed.take();
        Box::pin(async move {
            match failed {
                None => Ok(()),
                Some(message) => Err(ServerError::Validation { message, backtrace: Default::default() }),
            }
        })
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        bindings: KernelArguments,
        _: StreamId,
        _: LaunchMode,
    ) {
        let id = kernel.id();
        let Compiled { variant, source, shared_bytes } = match self.compile(&*kernel) {
            Ok(compiled) => compiled,
            Err(error) => {
                self.failed = Some(format!("{}: {error}", id.short_name()));
                return;
            }
        };
        if !matches!(count, CubeCount::Static(..)) {
            self.failed = Some(format!("{}: its blocks are counted on the device", id.short_name()));
        }
        let mut counted = Vec::new();
        let mut bytes = |resource: &KernelResource| {
            let buffer = match resource {
                KernelResource::Buffer(buffer) => buffer,
                KernelResource::TensorMap(map) => &map.binding,
            };
            let place = (buffer.memory.id(), buffer.offset_start);
            let again = counted.contains(&place);
            counted.push(place);
            if again { 0 } else { buffer.size - buffer.offset_start.unwrap_or(0) - buffer.offset_end.unwrap_or(0) }
        };
        let launch = Launch {
            name: id.short_name(),
            variant,
            source,
            shared_bytes,
            threads: id.cube_dim.x * id.cube_dim.y * id.cube_dim.z,
            buffer_bytes: bindings.resources.iter().map(&mut bytes).sum(),
        };
        LAUNCHES.lock().unwrap().push((self.arch.version, launch));
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        panic!("nothing runs that could be timed")
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        panic!("nothing runs that could be timed")
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl ServerStorage for RecordingServer {
    type Storage = NoStorage;

    fn get_resource(&mut self, _: BufferBinding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        panic!("memory that was not allocated has no address")
    }
}

/// No memory at all.
struct NoStorage;

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        512
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        unreachable!("nothing is allocated")
    }

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        unreachable!("nothing is allocated")
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}
